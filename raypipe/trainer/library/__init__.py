"""The fate of each argument, field and method of ``transformers.Trainer``: one row for each, in one place."""

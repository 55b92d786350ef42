"""Documents of Parquet, JSONL, text and Arrow files: tokenised when they are needed and packed into equal samples."""

META = "documents.json"
"""File of the prepared data that says where the documents are."""

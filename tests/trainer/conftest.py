"""The scripts are run by test_scripts.py, in a folder of their own."""

collect_ignore = ["scripts"]

"""``python -m raypipe`` is the ``raypipe`` command."""

from raypipe.cli import main

if __name__ == "__main__":
    main()

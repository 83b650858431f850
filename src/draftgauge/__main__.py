"""`python -m draftgauge` is the command line."""

from draftgauge.cli import main

if __name__ == "__main__":
    main()

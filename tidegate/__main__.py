"""`python -m tidegate` is the command `tidegate`."""

from tidegate.cli import main

if __name__ == "__main__":
    main()

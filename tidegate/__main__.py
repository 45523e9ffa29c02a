"""`python -m tidegate` is the command `tidegate`."""

from engine.imports import without_collections

if __name__ == "__main__":
    with without_collections():
        from tidegate.cli import main
    main()

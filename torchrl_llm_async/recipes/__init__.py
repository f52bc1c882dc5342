"""The recipes' code; ``recipes/*.py`` at the repository's root only call it."""

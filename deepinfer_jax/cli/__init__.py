"""Command line. Each sub-command is a function in a module of its own name."""

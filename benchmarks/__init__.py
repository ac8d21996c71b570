"""One script a question, JSON lines out. Nothing in the packages imports this folder."""

"""Generators of pages in docs/, and hooks for mkdocs; ``python -m scripts.docs`` writes the pages."""

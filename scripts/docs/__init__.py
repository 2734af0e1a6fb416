"""What of docs/ is generated, and what mkdocs needs besides: ``python -m scripts.docs`` writes it all."""

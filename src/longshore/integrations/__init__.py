"""longshore inside the trainers that people already use; nothing is imported before it is used."""

"""For operators: cases explained, pictures of plans, and what is installed here."""

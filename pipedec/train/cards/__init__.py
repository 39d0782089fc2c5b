"""Model cards: templates, and figures as text."""

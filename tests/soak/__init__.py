"""Long checks of whole clusters, which compare answers and hold budgets: ``PYTHONPATH=tests python -m soak.NAME --help``."""

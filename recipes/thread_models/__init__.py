"""Models that answer in decode threads: annotated data, fine-tuning (APAR, PASTA-SFT), preference training (BoNBoN)."""

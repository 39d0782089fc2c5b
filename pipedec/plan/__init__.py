"""What a partition costs before anything is started, and what an emulated device pretends to take."""

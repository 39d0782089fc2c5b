"""Random faults under load, against the answers that an undisturbed cluster gave."""

"""What made the models that pipedec ships; not part of the wheel."""

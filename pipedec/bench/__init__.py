"""Measurements. Ratios come from one run on one machine; nothing here is needed to decode."""

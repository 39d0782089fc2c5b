"""Plans: memory and times of a partition before anything is started, and the times of emulated devices."""

"""Load on recorded answers in computed time, and on llama.cpp."""

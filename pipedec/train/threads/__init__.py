"""Fine-tuning of models that answer in decode threads, and how their answers are measured."""

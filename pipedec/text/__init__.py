"""Text and token ids: tokenizer, chat template, stop strings, streamed text."""

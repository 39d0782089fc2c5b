"""Text and token ids: tokenizer, chat template, stop strings, text streaming."""

"""The target's answers by ``transformers`` alone, to compare a pipeline's with."""

"""BiTA: masks and a learned prompt with which a frozen target predicts tokens ahead."""

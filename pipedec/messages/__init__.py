"""Messages between processes as JSON, through Redis. The one place that knows these formats."""

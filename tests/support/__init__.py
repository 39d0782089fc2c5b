"""What several test files share: tiny models, naive references, stand-ins, processes, hosts."""

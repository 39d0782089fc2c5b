"""OpenAI's API: completions, chats, responses."""

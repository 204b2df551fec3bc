"""From prompts to target records: what the target model said, kept per token."""

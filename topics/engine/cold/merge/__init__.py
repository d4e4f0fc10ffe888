"""Merging of cold segments by external jobs: plan, verify, commit."""

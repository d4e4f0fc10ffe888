"""Merging cold segments together with an external job: plan, verify, commit."""

"""What a report says, and the files that say it."""

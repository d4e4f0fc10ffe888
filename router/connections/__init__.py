"""One client connection, whichever protocol it speaks."""

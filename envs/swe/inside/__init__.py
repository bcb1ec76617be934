"""What is mounted into sandboxes, read-only: it runs there, on its own, with whatever Python is there."""

"""What `steploop` does beside serving, and what it prints. Thread: main."""

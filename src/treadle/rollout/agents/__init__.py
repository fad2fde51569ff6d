"""Agent programs: their interface, the clients passed to them, and programs in separate processes."""

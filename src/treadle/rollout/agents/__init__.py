"""Agent programs: what they are, the clients that they are given, and those that run as a process of their own."""

"""The parts of exact chat rendering: template, structural tokens, identity of messages, marks, splices."""

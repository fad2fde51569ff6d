"""The recipe `judge-smollm2`: answers to customers, a rubric for them, and rules instead of a judging model."""

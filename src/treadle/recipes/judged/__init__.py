"""The recipe `judge-smollm2`: answers to customers, a rubric for them, and rules in place of a judging model."""

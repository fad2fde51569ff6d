"""Search-R1's task: questions, a search engine, an exact match of the answer."""

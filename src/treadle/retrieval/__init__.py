"""Retrieval: passages by query, from an index in this process or from a server.

    corpus.jsonl -> Corpus -> Bm25 | FlatIndex -> RetrievalQueue -> POST /retrieve -> RetrievalClient -> contents

Server and client speak the protocol of Search-R1's retrieval server.
"""

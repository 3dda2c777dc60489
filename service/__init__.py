"""Everything that knows BentoML: the explanation service, its types, engine, page and client."""

"""The page docs/papers.md: tables and figures of five papers, what they report and what we measured."""

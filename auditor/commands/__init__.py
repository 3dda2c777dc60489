"""The commands, grouped by what they are about; `auditor.cli` puts them together. Imports happen inside them."""

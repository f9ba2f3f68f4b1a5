"""The commands of `draftsmith`, by what they are about; `cli` puts them together."""

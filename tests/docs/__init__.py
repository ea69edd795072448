"""The documentation as a site, and the messages that its pages quote."""

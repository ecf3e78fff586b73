"""The building blocks of methods: flat models, clients, messages, random draws and mixing."""

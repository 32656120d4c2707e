"""Extensions that other packages add to Headrace without changing it."""

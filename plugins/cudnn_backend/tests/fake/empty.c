/* A library without anything in it. */
int fake_nothing;

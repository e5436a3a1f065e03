/* A library that only leads to another one: meson.build. */

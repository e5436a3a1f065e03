/* A library without code that depends on another library (meson.build). */

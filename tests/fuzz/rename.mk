# What a device for fuzzing calls in place of the C library (fuzz.h).
RENAME := $(foreach name,pthread_create pthread_join clock_gettime getrandom,\
	--redefine-sym $(name)=fuzz_$(name))
